"""Keys of passages kept on disk: what the late layout needs of a passage, computed once and read by every query."""
