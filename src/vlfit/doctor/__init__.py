"""The doctor: looks at this computer, and reads the logs of programs that failed."""
