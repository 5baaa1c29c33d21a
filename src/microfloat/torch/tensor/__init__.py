"""QuantizedTensor: its parts, the table of torch's operators on it, and the functions that make and read one."""
