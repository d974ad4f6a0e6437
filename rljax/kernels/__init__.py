"""Fused hot paths: one public function each, with implementations that agree."""
