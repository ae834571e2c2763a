"""`resile run` and torchrun's flags: a job on bare machines, whose nodes come by themselves."""
