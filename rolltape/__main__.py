"""`python -m rolltape`."""

from rolltape.cli import main

main()
