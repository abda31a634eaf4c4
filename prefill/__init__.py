"""The prefill room."""
