"""shoal.owner.enrolment."""
