"""A target as samplers see it: bound once, evaluated in bounded memory, with a geometry and starts."""
