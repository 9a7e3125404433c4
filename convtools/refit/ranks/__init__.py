"""Refit from several ranks: what each holds, who sends which bytes, and how they go in step."""
