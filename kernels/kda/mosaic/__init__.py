"""The parts of the "pallas_mosaic_tpu" implementation."""
