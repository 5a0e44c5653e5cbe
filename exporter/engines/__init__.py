"""Engines: graphs of a bundle built ahead of time by TensorRT or TensorRT-RTX, with the weights as inputs."""
