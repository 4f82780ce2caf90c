"""`manta quantize`: a checkpoint of plain weights becomes a quantized one, and a report of what that costs.

Weights are read, rounded and written tensor by tensor (`writing`), what a calibration needs is computed layer by layer
(`layerwise`): no model is held in memory whole. What rounds and how it is stored is the engine's (app/quantization).
"""
