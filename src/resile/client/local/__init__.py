"""Jobs of this machine: their directories, their masters and their supervisors."""
