from gaugelasso.cli import main

main()
