"""The entry points beside `scale` that few programs need: `inspect` and `roles`, and `lower`."""
