"""Tests of exactness."""
