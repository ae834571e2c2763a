"""Argument checks, logging and error files for the modules of `resile.torch`."""
