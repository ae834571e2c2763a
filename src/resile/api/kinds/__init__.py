"""The kinds of resources that users write: fields, names, labels, environment, and the way to a `JobSpec`."""
