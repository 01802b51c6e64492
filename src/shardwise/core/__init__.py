"""Values that need no communication: errors, meshes, placements, boxes, layouts."""
