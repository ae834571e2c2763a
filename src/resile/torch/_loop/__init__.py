"""The elastic loop: rendezvous, process groups, gradient averaging, and the state that members share."""
