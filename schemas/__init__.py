"""The contract between processes: messages, topics and their encoding. Imports no other package of this project."""
