"""Bodies of requests and responses: JSON, CSV and Arrow IPC."""

JSON, CSV, ARROW = "application/json", "text/csv", "application/vnd.apache.arrow.stream"
ARROW_FILE = "application/vnd.apache.arrow.file"
