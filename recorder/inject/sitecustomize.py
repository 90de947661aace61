"""Runs at the start of every Python process of a recorded job, in whatever interpreter that is.

Python imports the first `sitecustomize` on its path. This one starts the recorder's import hook
and then hands over to the next one, so that nobody else's is lost. Valid in Python 2.7 too: a job
may start anything. See docs/recording.md.
"""

import os
import sys

if __name__ == "sitecustomize":
    if os.environ.get("ROLLTAPE_TAPE") and sys.version_info >= (3, 7):
        try:
            import _rolltape_hook  # type: ignore[import-not-found]

            _rolltape_hook.start()
        except Exception as error:
            _what = (type(error).__name__, error)
            sys.stderr.write("rolltape: this process is not recorded: %s: %s\n" % _what)  # noqa: UP031

    # The folder leaves the path only while the next one is looked for: jobs build the PYTHONPATH
    # of their children from sys.path, and those children are to be recorded too.
    _here = os.path.dirname(os.path.abspath(__file__))
    _places = [i for i, entry in enumerate(sys.path) if entry == _here]
    for _i in reversed(_places):
        del sys.path[_i]
    _self = sys.modules.pop("sitecustomize")  # kept: Python 2 clears a module that nobody holds
    try:
        # No handler: an error, or that there is none, goes to site.py as it would without us.
        import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
    finally:
        for _i in _places:
            sys.path.insert(_i, _here)
