"""The model on more than one device, through engines that exist: FSDP2 and transformers' tensor parallelism.

README.md says what works, with the commands. The model's own code stays single-device.
"""
