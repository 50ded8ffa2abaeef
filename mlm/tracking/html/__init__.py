"""HTML pages without anything to load: their shell and elements, and the curves of runs in them."""
