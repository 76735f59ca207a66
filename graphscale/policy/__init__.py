"""The loss scales, their update rule, and the presets of other projects; numpy only."""
