"""CustomResourceDefinitions, generated from the types of the kinds."""
