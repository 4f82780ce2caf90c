"""The engine: a torch-free host half, a device half, and the executors that join them."""
