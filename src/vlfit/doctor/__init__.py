"""The doctor: checks of this computer, and causes of failures in logs."""
