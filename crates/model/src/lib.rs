//! Architectures written once over Backend; facts, names and transforms.
