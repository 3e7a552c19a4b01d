#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| k3_tests::fuzz::targets::listing(data));
