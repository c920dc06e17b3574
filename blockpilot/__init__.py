"""blockpilot: choose, measure and learn the block size of block-diffusion speculative decoding."""

__version__ = "0.1.0"
