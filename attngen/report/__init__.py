"""What people read of a module: `attngen explain`, its HTML page, charts, timelines, theory."""
