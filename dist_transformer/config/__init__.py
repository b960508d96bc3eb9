"""Settings, presets and flags."""
