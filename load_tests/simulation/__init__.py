"""A cluster on a virtual clock: real queues and placement, step costs instead of devices."""
