"""What runs recorded schedules again: a module per engine."""
