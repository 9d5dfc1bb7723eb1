"""Reports about a module: `attngen explain`, its HTML page, charts, timelines, theory."""
