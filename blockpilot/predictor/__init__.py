"""What predicts a block size: its examples, its net, its training."""
