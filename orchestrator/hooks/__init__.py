"""What both engine plugins need to hook into stock engines safely: versions, patches, signatures. Standard library only."""
