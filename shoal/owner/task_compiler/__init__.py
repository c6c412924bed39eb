"""From a torch module and a loss to an ONNX task that devices train without torch."""
