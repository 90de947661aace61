"""What a recorded job loads at start-up: a folder for PYTHONPATH, standard library only."""
