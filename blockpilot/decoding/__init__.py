"""Decoding core: values, extension points, sampler, cache, target and the one loop."""
