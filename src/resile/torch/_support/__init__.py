"""Argument checks, logging, error files and random number generators for the modules of `resile.torch`."""
