"""What a GPU computes and how fast: `outrider bench gpu-proof`, and the parts that it runs."""
