"""One module for each command of `resile`, except `run`, which is a folder of its own."""
