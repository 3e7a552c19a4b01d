//! Tests that cross the crates: outside outputs, identity of bits, refusals, budgets, the command.

mod alloc;
mod budgets;
mod counting;
mod docs;
mod faults;
mod fuzzing;
mod generate;
mod identity;
mod ops;
mod oracle;
mod pack;
mod prefill;
mod refusals;
mod run;
mod schedules;
mod sequences;
mod session;
mod soak;
mod stops;
mod synth;
