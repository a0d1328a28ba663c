"""The files of a checkpoint: written to the disk as a transaction, and verified on reading."""
