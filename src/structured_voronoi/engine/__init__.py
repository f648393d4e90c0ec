"""Texts under control: rejection that learns while it draws."""
