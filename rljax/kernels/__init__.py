"""Fused kernels: one public function each, with implementations that agree."""
