"""Where collections come from: BEIR, ir_datasets, Pyserini, the embedded model."""
