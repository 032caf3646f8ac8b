"""What people see of a run: the summary as data, the report as one HTML file.

``summary.summarize(folder)`` and ``html.write_report(folder)`` are the two ways in. Both read only the run folder's files
(:mod:`orchestrator.observe.report.run_log`), need no engine, and give the same bytes for the same folder.
"""
