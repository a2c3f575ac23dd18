"""What results say, for people: a page with charts, or Markdown for a pull request."""
