"""Inexact or slower methods, for comparison."""
