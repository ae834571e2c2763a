"""The training processes of one node: started, watched, stopped, and reported on."""
