"""The kernels in torch operations: any device, any floating type, no host synchronisation."""
