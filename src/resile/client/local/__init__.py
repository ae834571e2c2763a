"""Jobs of this machine: their directories, masters and supervisors."""
